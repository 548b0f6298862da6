"""The page's script that makes files of what it shows. Nothing is fetched, and nobody else is asked.

A chart is drawn once more as SVG by Bokeh, ranks by time, which are HTML, box by box; title and legend, which are HTML
too, are drawn around it, on the page's colour, so that the picture can stand alone. A PNG is that SVG painted at twice
its size.
"""

from __future__ import annotations

from typing import Final

SCRIPT: Final = r"""
(function(){
var NS='http://www.w3.org/2000/svg',PAD=12,LINE=18,FONT='12px system-ui, sans-serif';
function esc(text){return String(text).replace(/[&<>"]/g,function(c){
return {'&':'&amp;','<':'&lt;','>':'&gt;','"':'&quot;'}[c]})}
function keep(blob,name){
var link=document.createElement('a');link.href=URL.createObjectURL(blob);link.download=name;
document.body.appendChild(link);link.click();link.remove();setTimeout(function(){URL.revokeObjectURL(link.href)},60000)}
function all(root,selector){
var found=[].slice.call(root.querySelectorAll(selector));
root.querySelectorAll('*').forEach(function(e){if(e.shadowRoot)found=found.concat(all(e.shadowRoot,selector))});
return found}
function within(node,section){
for(;node;node=node.parentNode||node.host)if(node===section)return true;return false}
function plot(section){
var found=null,seen=new Set(),rest=Bokeh.index.roots.slice();
while(rest.length&&!found){var view=rest.pop();
if(!view||seen.has(view))continue;seen.add(view);
if(/^(Figure|Plot)$/.test(view.model.type)){if(within(view.el,section))found=view}
else rest.push.apply(rest,view.child_views||[])}
return found}
function paint(mark){ // a pattern is painted as its first colour, with a broken edge
var style=getComputedStyle(mark),first=/rgba?\([^)]*\)/.exec(style.backgroundImage);
return {ink:style.color,fill:first?first[0]:style.backgroundColor,hatched:!!first}}
function edge(look){return look.hatched?' stroke="'+getComputedStyle(document.body).color+'" stroke-dasharray="2 2"':''}
function strip(section){
var rows=all(section,'.agree-row');
if(!rows.length)return null;
var whole=rows[0].getBoundingClientRect(),left=0,bottom=0;
if(!whole.width)return null;
var parts=rows.map(function(row){
var place=row.getBoundingClientRect(),y=place.top-whole.top;bottom=y+place.height;
var cells=[].slice.call(row.querySelectorAll('.agree>i')).map(function(cell){
var box=cell.getBoundingClientRect(),look=paint(cell),x=box.left-whole.left;
return '<rect x="'+x+'" y="'+y+'" width="'+Math.max(1,box.width-1)+'" height="'+box.height+'" fill="'+look.fill+'"'+
edge(look)+'/><text text-anchor="middle" x="'+(x+box.width/2)+'" y="'+(y+13)+'" fill="'+look.ink+'">'+
esc(cell.textContent)+'</text>'});
left=row.querySelector('.agree').getBoundingClientRect().left-whole.left;
return '<text y="'+(y+13)+'">'+esc(row.querySelector('.agree-who').textContent)+'</text>'+cells.join('')});
var ends=all(section,'.agree-axis > span').map(function(end,k){
return '<text x="'+(k?whole.width:left)+'" y="'+(bottom+16)+'"'+(k?' text-anchor="end"':'')+'>'+esc(end.textContent)+
'</text>'});
return {width:whole.width,height:bottom+20,
text:'<g font-family="system-ui, sans-serif" font-size="12" fill="'+getComputedStyle(document.body).color+'">'+
parts.concat(ends).join('')+'</g>'}}
function chart(section){
var view=plot(section);
if(!view)return strip(section);
if(!view.bbox.width)return null;
var layer=view.export('svg'),text=layer.ctx.get_serialized_svg(true).replace(/^<\?xml[^>]*\?>/,'');
return {width:view.bbox.width,height:view.bbox.height,text:text}}
function legend(section){
return all(section,'.legend > span').map(function(item){
var line=item.querySelector('line'),mark=item.querySelector('i,b'),text=item.textContent.trim();
if(line)return {text:text,line:getComputedStyle(line).stroke,dash:line.getAttribute('stroke-dasharray')||''};
if(!mark)return {text:text};
var letter=mark.textContent.trim(),look=paint(mark);
return {text:letter?text.slice(letter.length):text,letter:letter,look:look}})}
function measure(text){
var pen=measure.pen||(measure.pen=document.createElement('canvas').getContext('2d'));pen.font=FONT;
return pen.measureText(text).width}
function drawn(section){
var body=chart(section);
if(!body)return null;
var width=Math.round(body.width)+2*PAD,style=getComputedStyle(document.body);
var chosen=all(section,'select').map(function(e){return e.selectedOptions[0].textContent.trim()});
var told=all(section,'h2').slice(0,1).concat(all(section,'.told')).map(function(e){return e.textContent.trim()});
var title=told.concat(chosen).join(' · '),y=PAD,parts=[];
var scale=all(section,'.scale')[0];
y+=LINE;parts.push('<text x="'+PAD+'" y="'+(y-5)+'" font-weight="600">'+esc(title)+'</text>');
var x=PAD,items=legend(section);
if(scale)items=[{text:all(scale,'span').map(function(e){return e.textContent}).join(' to '),
bar:getComputedStyle(scale.querySelector('i')).backgroundImage}];
if(items.length)y+=LINE;
items.forEach(function(item){
var room=item.bar?126:28,wide=room+measure(item.text)+14;
if(x+wide>width-PAD&&x>PAD){x=PAD;y+=LINE}
if(item.line)parts.push('<line x1="'+x+'" x2="'+(x+22)+'" y1="'+(y-9)+'" y2="'+(y-9)+'" stroke="'+item.line+
'" stroke-width="2.5" stroke-dasharray="'+item.dash+'"/>');
else if(item.letter)parts.push('<text x="'+(x+8)+'" y="'+(y-5)+'" font-weight="700">'+esc(item.letter)+'</text>');
else if(item.bar){var stops=item.bar.match(/rgba?\([^)]*\)/g)||[];
parts.push('<defs><linearGradient id="scale">'+stops.map(function(c,k){
return '<stop offset="'+k/Math.max(1,stops.length-1)+'" stop-color="'+c+'"/>'}).join('')+
'</linearGradient></defs><rect x="'+x+'" y="'+(y-14)+'" width="120" height="10" fill="url(#scale)"/>')}
else if(item.look)parts.push('<rect x="'+(x+6)+'" y="'+(y-15)+'" width="12" height="12" rx="2" fill="'+item.look.fill+
'"'+edge(item.look)+'/>');
parts.push('<text x="'+(x+room)+'" y="'+(y-5)+'">'+esc(item.text)+'</text>');x+=wide});
var height=y+4+Math.round(body.height)+PAD;
var head='<svg xmlns="'+NS+'" width="'+width+'" height="'+height+'" viewBox="0 0 '+width+' '+height+'"><title>'+
esc(title)+'</title><rect width="100%" height="100%" fill="'+style.backgroundColor+'"/>';
return {width:width,height:height,text:head+'<g font-family="system-ui, sans-serif" font-size="12" fill="'+style.color+
'">'+parts.join('')+'</g><g transform="translate('+PAD+','+(y+4)+')">'+body.text+'</g></svg>'}}
function picture(section,kind,name,tries){
var made=drawn(section);
if(!made){ // a chart that is still being laid out
if((tries||0)<100)setTimeout(function(){picture(section,kind,name,(tries||0)+1)},100);
return}
var svg=new Blob([made.text],{type:'image/svg+xml'});
if(kind==='svg')return keep(svg,name);
var image=new Image(),url=URL.createObjectURL(svg);
image.onload=function(){
var canvas=document.createElement('canvas');canvas.width=2*made.width;canvas.height=2*made.height;
canvas.getContext('2d').drawImage(image,0,0,canvas.width,canvas.height);URL.revokeObjectURL(url);
canvas.toBlob(function(blob){keep(blob,name)},'image/png')};
image.src=url}
addEventListener('dtrain-picture',function(event){
var asked=event.detail,root=asked.button.getRootNode();
picture((root.host||asked.button).closest('section'),asked.kind,asked.name)});
addEventListener('dtrain-file',function(event){
var file=event.detail;keep(new Blob([file.data],{type:file.type}),file.name)});
})();
"""
